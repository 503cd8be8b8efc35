"""The OpenAPI document: what FastAPI finds in the routes, and what holds for many of them at once.

Errors are problem details, every POST takes an Idempotency-Key, what has an ETag can be asked for
again, and a job is described field by field (`planner.api.job_schema`).
"""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from planner.api.http.bodies import JSON
from planner.api.http.problems import MEDIA_TYPE
from planner.api.http.requests import MAX_KEY_LENGTH
from planner.api.job_schema import job_schema

Document = dict[str, Any]
JOB = "JobBody"
REFUSALS = (401, 403, 429)  # of every operation that needs a key
UNREAD = (408, 413, 415)  # of every operation that takes a body
WRONG = 422  # of every one that takes parameters or a body
UNFOUND = (404, 410)  # of every path that names something; what is there may be unreadable
NO_DATABASE = ("/catalog/", "/jobs/", "/metrics")  # all others may be 503
FIRST_ERROR, NOT_MODIFIED = 400, "304"
IDEMPOTENCY_KEY: Document = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH},
    "description": "A text of your choice, such as a UUID. The same key with the same body gets "
    "the same answer for a day, and the work is done once.",
}
IF_NONE_MATCH: Document = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "The ETag of what you hold: 304 if it is still the same.",
}
FASTAPI_S_OWN = {"$ref": "#/components/schemas/HTTPValidationError"}
PROBLEM = {"$ref": "#/components/schemas/Problem"}
ETAG: Document = {"description": "Names this very answer.", "schema": {"type": "string"}}
BEARER = (
    "One of the keys in PLANNER_API_KEYS, with the scope that the operation names. A service that "
    "only its own machine can reach may run without keys."
)


def install(app: FastAPI) -> None:
    """Makes `app.openapi()` answer this document."""

    def openapi() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> Document:
    found = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    operations = ((path, *one) for path, all in found["paths"].items() for one in all.items())
    for path, method, operation in operations:
        parameters = operation.setdefault("parameters", [])
        answers = operation["responses"]
        if "security" in operation:
            statuses = [*REFUSALS, *(UNFOUND if "{" in path else ())]
            if parameters or "requestBody" in operation:
                statuses.append(WRONG)
            if not path.startswith(NO_DATABASE):
                statuses.append(503)
            answers |= {str(status): _problem(status) for status in statuses}
        if method == "post":
            parameters.append(IDEMPOTENCY_KEY)
            answers.setdefault("409", _problem(409))
        if "requestBody" in operation:
            body = operation["requestBody"]
            body["required"] = True  # also of one that may be null
            if body["content"].get(JSON, {}).get("schema", {}).get("title") == "Job":
                body["content"][JSON]["schema"] = {"$ref": f"#/components/schemas/{JOB}"}
            answers |= {str(status): _problem(status) for status in UNREAD}
        if NOT_MODIFIED in answers:
            parameters.append(IF_NONE_MATCH)
            answers["200"]["headers"] = {"ETag": ETAG}
        for status, response in answers.items():
            content = response.get("content", {})
            if content.get(JSON, {}).get("schema", {}) == FASTAPI_S_OWN:
                content[JSON] = {"schema": PROBLEM}
            if int(status) >= FIRST_ERROR and JSON in content:
                content[MEDIA_TYPE] = content.pop(JSON)
    schemas = found["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas[JOB] = {**_job(schemas), "example": schemas[JOB]["example"]}
    for scheme in found["components"]["securitySchemes"].values():
        scheme["description"] = BEARER
    return found


def _problem(status: int) -> Document:
    return {"description": HTTPStatus(status).phrase, "content": {JSON: {"schema": PROBLEM}}}


def _job(schemas: Document) -> Document:
    """The job's schema; what it refers to joins `schemas` under names of its own."""
    job = job_schema("#/components/schemas/Job{model}")
    schemas |= {f"Job{name}": part for name, part in job["$defs"].items()}
    return {name: part for name, part in job.items() if name not in ("$defs", "$schema")}
