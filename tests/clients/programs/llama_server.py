"""Serves a GGUF file with llama.cpp's own server until it is ended: llama_server.py FILE PORT HOW.

HOW is "usual", or "exact": then attention stays in float32, where it is rounded to float16 else.
"""

import signal
import sys

import xllamacpp

file, port, how = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = file
params.port = int(port)
if how == "exact":
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.n_parallel = 1
# As many tokens as the file says.
params.n_ctx = 0
params.warmup = False
# Threads of its own wait awake for each other, which is slow where others use the cores.
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
