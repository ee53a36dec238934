"""Every way a request can go wrong, as HTTP: a status, and OpenAI's error object.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`param` is the path of the field at fault, `code` our stable name of the error. Server errors say
whether the request may have been executed, which is what decides about a retry.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, ClassVar

from aiohttp import web

from libs.errors import Backpressure, BadInput, OperatingError, error_from_code
from services.gateway.core import Failure

_STATUS = {
    "bad_input": HTTPStatus.BAD_REQUEST,
    "context_length_exceeded": HTTPStatus.BAD_REQUEST,
    "capacity_exceeded": HTTPStatus.BAD_REQUEST,
    "model_not_found": HTTPStatus.NOT_FOUND,
    "body_too_slow": HTTPStatus.REQUEST_TIMEOUT,
    "body_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "backpressure": HTTPStatus.TOO_MANY_REQUESTS,
    "not_ready": HTTPStatus.SERVICE_UNAVAILABLE,
    "deadline_exceeded": HTTPStatus.GATEWAY_TIMEOUT,
}

_TYPES = {
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}

_HTTP_CODES = {
    HTTPStatus.NOT_FOUND: "unknown_url",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
}


class NotReady(OperatingError):
    """The pod has not come up yet."""

    code: ClassVar[str] = "not_ready"
    retry_after_s: ClassVar[int] = 1


class BodyTooLarge(OperatingError):
    """The HTTP body exceeds the limit."""

    code: ClassVar[str] = "body_too_large"


class BodyTooSlow(OperatingError):
    """The HTTP body did not arrive in time."""

    code: ClassVar[str] = "body_too_slow"


def error_of_failure(failure: Failure) -> OperatingError:
    """The error that ended a request somewhere in the pod."""
    message = f"{failure.reason} (stage: {failure.stage})"
    return error_from_code(failure.code, message, definite=failure.definite)


def status_of(error: OperatingError) -> HTTPStatus:
    """The HTTP status of an error."""
    return _STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_object(error: OperatingError) -> dict[str, Any]:
    """OpenAI's error object."""
    status, message = status_of(error), error.message
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        retry = "nothing was executed, a retry is safe"
        message += f"; {retry if error.definite else 'it may have been executed in part'}"
    param = error.field if isinstance(error, BadInput) else None
    if error.code == "model_not_found":
        param = "model"
    return _object(message, status, param, error.code)


def error_response(error: OperatingError) -> web.Response:
    """The response that reports an error before any answer has begun."""
    headers = {}
    if isinstance(error, Backpressure | NotReady):
        headers["Retry-After"] = str(error.retry_after_s)
    status = status_of(error)
    return web.json_response(error_object(error), status=status, headers=headers)


def http_response(error: web.HTTPException, request: web.Request) -> web.Response:
    """What the server itself refuses: an unknown route, a wrong method."""
    status = HTTPStatus(error.status)
    hint = f"{request.method} {request.path}: {status.phrase.lower()}"
    code = _HTTP_CODES.get(status, status.phrase.lower().replace(" ", "_"))
    kept = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    return web.json_response(_object(hint, status, None, code), status=status, headers=kept)


def _object(message: str, status: HTTPStatus, param: str | None, code: str) -> dict[str, Any]:
    kind = "invalid_request_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
