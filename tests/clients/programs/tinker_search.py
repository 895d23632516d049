"""An agent of tinker-cookbook that searches, unmodified: tinker_search.py RECIPE NAME=VALUE...

RECIPE is chat_sl.train, for a start from demonstrations, which are in demonstrations.jsonl; or
search_tool.train, which asks about other places than those of the demonstrations. Its index and
its embedding are services elsewhere: in their place are an index in this process and an embedding
by words. The tokenizer is that of a folder with the model's name, where the program runs.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import runpy
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pandas as pd

CAPITALS = {
    "Arland": "Tosby",
    "Belmar": "Quill",
    "Corvia": "Hatton",
    "Dunmor": "Vale",
    "Elstan": "Brook",
    "Farnia": "Stone",
    "Galdor": "Reed",
    "Hestia": "Marsh",
    "Ilmara": "Ford",
    "Jorvik": "Glen",
    "Kelder": "Rook",
    "Lorain": "Dale",
    "Morwen": "Finch",
    "Norland": "Pike",
    "Ostara": "Wren",
    "Pellan": "Heath",
}
NUM_DEMONSTRATED = 8
COLLECTION = "wiki_embeddings"


def question(place: str) -> str:
    return f"What is the capital of {place}?"


def document(place: str) -> str:
    return f"The capital of {place} is {CAPITALS[place]}."


def embedding(text: str, dim: int) -> list[float]:
    """Counts of words, by hash, with norm 1."""
    counts = [0.0] * dim
    for word in "".join(c if c.isalnum() else " " for c in text.lower()).split():
        counts[zlib.crc32(word.encode()) % dim] += 1
    norm = math.sqrt(sum(count * count for count in counts)) or 1.0
    return [count / norm for count in counts]


class Index:
    """In place of a collection of the index, and of its client."""

    async def get_collection(self, name: str) -> Index:
        assert name == COLLECTION
        return self

    async def query(
        self, query_embeddings: list[list[float]], n_results: int
    ) -> dict[str, list[list[str]]]:
        documents = [document(place) for place in CAPITALS]

        def found(query: list[float]) -> list[str]:
            def distance(text: str) -> float:
                other = embedding(text, len(query))
                return -sum(a * b for a, b in zip(query, other, strict=True))

            return sorted(documents, key=distance)[:n_results]

        return {"documents": [found(query) for query in query_embeddings]}


class Embedder:
    """In place of the client of the embedding."""

    def __init__(self, **_: Any) -> None:
        self.aio = types.SimpleNamespace(models=self)

    async def embed_content(self, *, model: str, contents: list[str], config: Any) -> Any:
        dim = config.output_dimensionality
        made = [types.SimpleNamespace(values=embedding(text, dim)) for text in contents]
        return types.SimpleNamespace(embeddings=made)


def replace_services() -> None:
    """Puts modules of that which runs here where the recipe imports those of the services."""

    async def index(**_: Any) -> Index:
        return Index()

    options = types.SimpleNamespace
    replaced: dict[str, dict[str, Any]] = {
        "chromadb": {"AsyncHttpClient": index},
        "chromadb.api": {"AsyncClientAPI": Index},
        "chromadb.api.types": {"QueryResult": dict},
        "chromadb.config": {"Settings": options},
        "google.genai": {"Client": Embedder},
        "google.genai.types": {"HttpOptions": options, "EmbedContentConfig": options},
    }
    for name, content in replaced.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module
    vars(sys.modules["google.genai"])["types"] = sys.modules["google.genai.types"]
    os.environ |= {"GCP_VERTEXAI_PROJECT_NUMBER": "0", "GCP_VERTEXAI_REGION": "here"}


def questions(*_: Any, filename: str, local_dir: Path, **__: Any) -> str:
    """In place of huggingface_hub.hf_hub_download: the places that nobody demonstrated."""
    places = [*CAPITALS][NUM_DEMONSTRATED:]
    rows = [
        {"question": question(place), "golden_answers": [CAPITALS[place]], "data_source": "places"}
        for place in places * 8
    ]
    path = Path(local_dir) / filename
    pd.DataFrame(rows).to_parquet(path)
    return str(path)


async def demonstrations(model: str, renderer_name: str) -> list[dict[str, Any]]:
    """Conversations in which the tool is called, as the recipe's environment puts them."""
    from tinker_cookbook.recipes.search_tool import search_env, tools
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    tool = await tools.ChromaTool.build(
        "here", 0, COLLECTION, retrieval_config=tools.RetrievalConfig(n_results=1)
    )
    prefix = get_renderer(
        renderer_name, get_tokenizer(model)
    ).create_conversation_prefix_with_tools(
        tools=[tool.search.to_spec()], system_prompt=search_env.SEARCH_TASK_INSTRUCTIONS
    )
    made = []
    for place in [*CAPITALS][:NUM_DEMONSTRATED]:
        query = f"capital of {place}"
        call = {"name": "search", "arguments": {"query_list": [query]}}
        found = f"Query: {query}\nDocument 1:\n{document(place)}\n"
        turns = [
            ("user", question(place)),
            ("assistant", f"<tool_call>\n{json.dumps(call)}\n</tool_call>"),
            ("tool", found),
            ("assistant", f"Answer: {CAPITALS[place]}"),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        made.append({"messages": [*prefix, *messages]})
    return made


if __name__ == "__main__":
    replace_services()
    vars(huggingface_hub)["hf_hub_download"] = questions
    recipe = sys.argv.pop(1)
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    shown = asyncio.run(demonstrations(options["model_name"], options["renderer_name"]))
    Path("demonstrations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in shown))
    runpy.run_module(f"tinker_cookbook.recipes.{recipe}", run_name="__main__", alter_sys=True)
