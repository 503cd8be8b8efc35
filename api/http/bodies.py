"""Bodies of requests: FastAPI reads them through here, within a limit and as strict JSON."""

from typing import Annotated, Any

import anyio
from fastapi import Body, Request
from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from starlette.requests import ClientDisconnect

from planner.api.errors import BodyTooLargeError, MediaTypeError, SlowBodyError
from planner.api.http.schemas import JobBody
from planner.api.input.text import read_json
from planner.errors import Fault, fault
from planner.units import MEGA

JSON = "application/json"
DRAINED_BYTES = int(32 * MEGA)


class StrictRequest(Request):
    """A request whose body is read once, and only if it is of a taken media type and size.

    JSON has no key twice, no NaN, no endless nesting (`read_json`).

    Reading raises MediaTypeError, BodyTooLargeError and SpecError.
    """

    media_types: tuple[str, ...] = (JSON,)
    within: str = ""  # see `check_plain`

    @property
    def media_type(self) -> str:
        """The media type of the body, without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def body(self) -> bytes:
        """The raw body. Its JSON value is ready after it, as `json()`."""
        if not hasattr(self, "_body"):
            if self.media_type not in self.media_types:
                taken = " or ".join(self.media_types)
                rule, remedy = f"is not {taken}", f"send it with content type {taken}"
                raise MediaTypeError(Fault("content-type", self.media_type or None, rule, remedy))
            raw = await self._read()
            if self.media_type == JSON:
                self._json = read_json(raw, "body", self.within)
            self._body = raw
        return self._body

    async def _read(self) -> bytes:
        limit = self.app.state.wiring.settings.max_body_bytes
        chunks, total = [], 0
        seconds = self.app.state.wiring.settings.request_seconds
        try:
            with anyio.fail_after(seconds):
                async for chunk in self.stream():
                    total += len(chunk)
                    if total <= limit:
                        chunks.append(chunk)
                    elif total > DRAINED_BYTES:
                        # what is over the limit is read and dropped, so that the sender gets the
                        # answer; but not without end
                        break
        except TimeoutError:
            rule = f"had not come whole after {seconds:.0f} s"
            raise SlowBodyError(Fault("body", None, rule, "send it faster")) from None
        except ClientDisconnect:
            raise fault("body", None, "ended before all of it had come", "send it again") from None
        if total > limit:
            raise BodyTooLargeError(
                Fault("body", None, f"is larger than {limit:,} bytes", "send fewer jobs at once")
            )
        return b"".join(chunks)


class CheckedByPlanner:
    """Marks a body that the planner checks, all faults at once; OpenAPI shows the type's schema."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __get_pydantic_json_schema__(
        self, _: Any, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(TypeAdapter(self.shape).core_schema)


JobJson = Annotated[Any, CheckedByPlanner(JobBody), Body()]
