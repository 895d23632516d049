"""Bodies that Tinker's client 0.38.0 wrote, of data and settings of ours."""

from __future__ import annotations

import json

SAMPLE = json.loads(
    '{"num_samples": 2, "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"},'
    '{"tokens": [3], "type": "encoded_text"}]}, "sampling_params": {"max_tokens": 8, "seed": 7,'
    '"stop": ["\\n"], "temperature": 0.5, "top_k": 3, "top_p": 0.9}, "sampling_session_id": "s",'
    '"seq_id": 22801844000000000, "prompt_logprobs": true, "topk_prompt_logprobs": 2,'
    '"topk_sample_logprobs": 0, "target_prompt_logprobs": {"data": [5], "dtype": "int64",'
    '"shape": [2, 2], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]},'
    '"prompt_alt_tokens_k": 0, "prompt_logprobs_last_n": 1, "record_stability_info": true,'
    '"type": "sample"}'
)
