"""Text to tokens and back, in the form of vLLM's API."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from deploy.openai_api.errors import documented
from deploy.openai_api.large import LargeBodyRoute
from deploy.openai_api.requests import Body, ListOf
from deploy.service import Service


class TokenizeRequest(Body):
    """A text to be converted into tokens."""

    prompt: str = Field(description="the text")
    model: str | None = None
    add_special_tokens: bool = Field(True, description="with the special tokens that a completion's prompt gets")
    return_token_strs: bool | None = Field(False, description="give the tokens as the vocabulary writes them, too")


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int = Field(description="the most tokens of a prompt and its output together")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Tokens to be converted into text."""

    tokens: ListOf[int] = Field(description="their ids, as many as fit the context")
    model: str | None = None


class DetokenizeResponse(BaseModel):
    prompt: str = Field(description="the text, with the names of special tokens")


def token_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute)

    @router.post("/tokenize", responses=documented(400, 404, 413, 429, 500, 503))
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Converts a text into the target's tokens."""
        service.check_model(body.model or service.model.name)
        with service.placed():
            tokens = await service.encode(body.prompt, special=body.add_special_tokens)
        names = service.model.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return TokenizeResponse(
            count=len(tokens), max_model_len=service.model.limits.context_length, tokens=list(tokens), token_strs=names
        )

    @router.post("/detokenize", responses=documented(400, 404, 413, 429, 500, 503))
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Converts the target's tokens into text."""
        service.check_model(body.model or service.model.name)
        with service.placed():
            return DetokenizeResponse(prompt=await service.decode(body.tokens))

    return router
