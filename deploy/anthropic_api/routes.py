"""The routes of Anthropic's Messages API."""

import asyncio

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

from deploy.anthropic_api.answers import PATH, MessageAnswer
from deploy.anthropic_api.requests import NAMES, CountRequest, MessagesRequest, chat_request
from deploy.openai_api.chat_requests import chat_from
from deploy.openai_api.errors import ANSWERS, AnthropicErrorBody, documented, error_response
from deploy.openai_api.items import renamed
from deploy.openai_api.large import LargeBodyRoute
from deploy.openai_api.streaming import WHOLE_OR_EVENTS, sent
from deploy.service import Service
from triforce_core.errors import InvalidValueError, TriForceError


class TokenCount(BaseModel):
    input_tokens: int


def anthropic_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute)
    refusals = {answer.status for answer in ANSWERS.values()} | {500}
    errors = documented(*refusals, body=AnthropicErrorBody)

    @router.post(PATH, responses=WHOLE_OR_EVENTS | errors)
    async def message(body: MessagesRequest) -> Response:
        """Answers a chat in the form of Anthropic's API, whole or as server-sent events."""
        try:
            chat = chat_from(await asyncio.to_thread(chat_request, body, service.chat), service, fits=True)
            answer = MessageAnswer(chat, body, service.model.name)
            return await sent(answer, service.complete(chat.asked), stream=body.stream)
        except TriForceError as error:
            return refused(error)

    @router.post(f"{PATH}/count_tokens", responses=errors, response_model=TokenCount)
    async def count(body: CountRequest) -> Response | TokenCount:
        """Counts the tokens of a chat's prompt, in the form of Anthropic's API."""
        try:
            chat = chat_from(await asyncio.to_thread(chat_request, body, service.chat), service)
            with service.placed():
                assert chat.asked.prepare is not None
                prompt = (await chat.asked.prepare()).prompt
            return TokenCount(input_tokens=len(prompt))
        except TriForceError as error:
            return refused(error)

    return router


def refused(error: TriForceError) -> Response:
    return error_response(renamed(error, NAMES) if isinstance(error, InvalidValueError) else error, PATH)
