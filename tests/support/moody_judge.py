"""A judge in OpenRLHF's form that answers the same row differently each time it is asked."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from support.reward_servers import RewardServer


class MoodyJudge(RewardServer):
    """What it answers depends on the row, and on how often it has answered this row before.

    So a run in which no row is answered twice has the same bits each time, and one in which a row
    is answered twice has others. A row that fails at the first time may be judged at the second.
    """

    def __init__(self, fails_of_seven: int = 0) -> None:
        """Begins; of seven answers about so many are failures."""
        self.answered: Counter[str] = Counter()
        """How often each row was answered, also with a failure."""
        self.asked = 0
        """Requests that have arrived."""
        self.instead: Callable[[int], bool] = lambda number: False
        """Is told the number of each request; where it says so, no answer is ever given."""
        self._fails_of_seven = fails_of_seven
        self._lock = threading.Lock()
        super().__init__()

    def forget(self) -> None:
        """Judges as if it had answered nothing yet."""
        with self._lock:
            self.asked = 0
            self.answered = Counter()

    def _make_app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/get_reward")
        async def judge(request: Request) -> Response:
            given = await request.json()
            with self._lock:
                self.asked += 1
                number = self.asked
            if await asyncio.to_thread(self.instead, number):
                # The one who asked is dead.
                return JSONResponse({}, status_code=503)
            with self._lock:
                rewards = [self.answer(query) for query in given["query"]]
            if None in rewards:
                return JSONResponse({"detail": "not in the mood"}, status_code=404)
            return JSONResponse({"rewards": rewards, "extra_logs": {"mood": rewards}})

        return app

    def answer(self, query: str) -> float | None:
        """The next answer to a row; None: a failure."""
        text = f"{query}\0{self.answered[query]}".encode()
        self.answered[query] += 1
        mood = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
        return None if mood % 7 < self._fails_of_seven else mood / 2**64
