"""A task of inspect-ai: the model says a word, and may use a tool first."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool


@tool
def weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: Name of the city.
        """
        return f"It rains in {city}."

    return execute


@task
def greeting() -> Task:
    return Task(
        dataset=[Sample(input="Say hello.", target="ello"), Sample(input="Say bye.", target="qqq")],
        solver=[system_message("Be short."), generate()],
        scorer=includes(),
        config=GenerateConfig(max_tokens=24, temperature=0.0, seed=7),
    )


@task
def forecast() -> Task:
    return Task(
        dataset=[Sample(input="How is the weather in Rome?", target="rains")],
        solver=[
            use_tools(weather(), tool_choice=ToolFunction("weather")),
            generate(),
        ],
        scorer=includes(),
        message_limit=4,
        config=GenerateConfig(max_tokens=64, temperature=0.0, logprobs=True, top_logprobs=1),
    )
