"""The route of OpenAI's Responses API."""

import asyncio

from fastapi import APIRouter
from fastapi.responses import Response

from deploy.openai_api.chat_requests import chat_from
from deploy.openai_api.errors import ANSWERS, documented, error_response
from deploy.openai_api.large import LargeBodyRoute
from deploy.openai_api.streaming import WHOLE_OR_EVENTS, sent
from deploy.responses_api.answers import ResponseAnswer
from deploy.responses_api.requests import ResponsesRequest, chat_request, renamed_to_client
from deploy.service import Service
from triforce_core.errors import InvalidValueError, TriForceError


def response_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute)
    refusals = {answer.status for answer in ANSWERS.values()} | {500}

    @router.post("/v1/responses", responses=WHOLE_OR_EVENTS | documented(*refusals))
    async def respond(body: ResponsesRequest) -> Response:
        """Answers a chat in the form of OpenAI's Responses API, whole or as server-sent events. Stores nothing."""
        try:
            chat = chat_from(await asyncio.to_thread(chat_request, body, service.chat), service)
            answer = ResponseAnswer(chat, body, service.model.name)
            return await sent(answer, service.complete(chat.asked), stream=body.stream)
        except TriForceError as error:
            return error_response(renamed_to_client(error, body) if isinstance(error, InvalidValueError) else error)

    return router
