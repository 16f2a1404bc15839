"""The SDK against a real gRPC server: what it sends and returns, how it fails, and that closing a stream cancels it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from triforce_core.client import (
    Acceptance,
    AuthenticationError,
    CallArguments,
    CallCancelledError,
    CallError,
    Choice,
    Chunk,
    Completion,
    DeadlineExceededError,
    EngineCrashError,
    FingerprintError,
    InvalidRequestError,
    Model,
    NotFoundError,
    OverloadedError,
    ServerError,
    Stats,
    TokenLogprobs,
    TriForceClient,
    UnavailableError,
    Usage,
)
from triforce_core.errors import TriForceError

USAGE = pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
STATS = pb.Stats(prefill_s=0.5, ms_per_token=2.0, tokens_per_round=1.5, acceptance=pb.Acceptance(retrieval=0.75))
THE_STATS = Stats(prefill_s=0.5, ms_per_token=2.0, tokens_per_round=1.5, acceptance=Acceptance(None, 0.75))


LOGPROBS = [
    pb.TokenLogprobs(logprob=-0.5, top_ids=[7, 9], top_logprobs=[-0.5, -1.5]),
    pb.TokenLogprobs(logprob=-2.0),
]
THE_LOGPROBS = (TokenLogprobs(-0.5, {7: -0.5, 9: -1.5}), TokenLogprobs(-2.0, {}))


class ScriptedGeneration(GenerationServicer):
    """Answers the same two tokens to everything but some prompts.

    `fail:CODE` fails, `break` fails half way, `hang` never ends, `empty` has no output, `long` much of it.
    """

    def __init__(self) -> None:
        self.request = pb.GenerateRequest()
        self.metadata: dict[str, str | bytes] = {}
        self.time_remaining: float | None = None
        self.ended = threading.Event()  # of the latest call, as gRPC tells the server

    def note(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> None:
        self.request, self.metadata = request, dict(context.invocation_metadata())
        self.time_remaining = context.time_remaining()
        self.ended = ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()
        if request.text.startswith("fail:"):
            code = request.text.removeprefix("fail:")
            context.abort(grpc.StatusCode[code], f"temperature: -1 must be 0 or more ({code})")

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self.note(request, context)
        if request.text == "hang":
            self.ended.wait(10)
        if request.text == "empty":
            return pb.GenerateResponse(model="demo", choices=[pb.Choice(stats=pb.Stats(prefill_s=0.5))])
        if request.text == "long":
            return pb.GenerateResponse(model="demo", choices=[pb.Choice(text="a" * 5_000_000)])
        choice = pb.Choice(
            text="ab",
            token_ids=[7, 8],
            origins=b"\x00\x02",
            finish_reason=pb.FINISH_REASON_STOP,
            stats=STATS,
            seed=request.seed,
            logprobs=LOGPROBS,
        )
        more = [pb.Choice(text=str(index)) for index in range(1, request.n)]
        return pb.GenerateResponse(
            model="demo", choices=[choice, *more], usage=USAGE, prompt_logprobs=[pb.TokenLogprobs()]
        )

    def GenerateStream(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateChunk]:
        self.note(request, context)
        yield pb.GenerateChunk(
            text="a",
            token_ids=[7],
            origins=b"\x00",
            seed=request.seed,
            logprobs=LOGPROBS[:1],
            prompt_logprobs=[pb.TokenLogprobs()],
        )
        if request.text == "hang":
            self.ended.wait(10)
        if request.text == "break":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the replica died")
        yield pb.GenerateChunk(
            text="b",
            token_ids=[8],
            origins=b"\x02",
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=USAGE,
            stats=STATS,
            index=1,
        )
        if request.n > 1:
            yield pb.GenerateChunk(finish_reason=pb.FINISH_REASON_LENGTH, usage=USAGE, stats=STATS)

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        self.metadata = dict(context.invocation_metadata())
        return pb.ListModelsResponse(models=[pb.Model(id="demo", context_length=32768)])


def serve(servicer: ScriptedGeneration, port: int = 0) -> tuple[grpc.Server, int]:
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


@pytest.fixture
def servicer() -> ScriptedGeneration:
    return ScriptedGeneration()


@pytest.fixture
def address(servicer: ScriptedGeneration) -> Iterator[str]:
    server, port = serve(servicer)
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


@pytest.fixture
def client(address: str) -> Iterator[TriForceClient]:
    with TriForceClient(address, timeout_s=10, retries=0) as client:  # test_client_calls.py tests retries
        yield client


def test_generate_returns_the_whole_completion(client: TriForceClient) -> None:
    choice = Choice("ab", (7, 8), b"\x00\x02", "stop", THE_STATS, 5, THE_LOGPROBS)
    completion = client.generate("abc", seed=5)
    assert completion == Completion("demo", (choice,), Usage(3, 2, 1), (TokenLogprobs(None, {}),))
    for field in Choice.__dataclass_fields__:
        assert getattr(completion, field) == getattr(choice, field)


def test_several_completions_come_in_order(client: TriForceClient) -> None:
    assert [choice.text for choice in client.generate("abc", n=3).choices] == ["ab", "1", "2"]


def test_stream_returns_the_chunks_in_order(client: TriForceClient) -> None:
    assert list(client.stream("abc", seed=5)) == [
        Chunk("a", (7,), b"\x00", seed=5, logprobs=THE_LOGPROBS[:1], prompt_logprobs=(TokenLogprobs(None, {}),)),
        Chunk("b", (8,), b"\x02", "length", Usage(3, 2, 1), THE_STATS, index=1),
    ]


def test_figures_that_do_not_exist_are_none(client: TriForceClient) -> None:
    completion = client.generate("empty")
    assert completion.stats == Stats(0.5, None, None, Acceptance(None, None))
    assert completion.logprobs == ()


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -1, -(2**63)])
def test_a_seed_is_any_signed_64_bit_number(client: TriForceClient, servicer: ScriptedGeneration, seed: int) -> None:
    completion, first = client.generate("abc", seed=seed), next(client.stream("abc", seed=seed))
    assert servicer.request.seed == seed % 2**64
    assert completion.seed == first.seed == seed


def test_models(client: TriForceClient) -> None:
    assert client.models() == (Model("demo", 32768),)


def test_every_argument_reaches_the_server(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    expected = pb.GenerateRequest(
        model="demo",
        token_ids=pb.TokenIds(values=[5, 6]),
        sampling=pb.Sampling(
            temperature=0,
            top_k=4,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0,
            frequency_penalty=-1,
            min_tokens=2,
            logit_bias={5: -100, 6: 0.5},
            bad_word_ids=[pb.TokenIds(values=[1, 2])],
        ),
        seed=0,
        n=2,
        ignore_eos=True,
        stop_token_ids=[3],
        bad_words=["bad"],
        logprobs=0,
        prompt_logprobs=2,
        echo=True,
        choice=pb.Choices(values=["yes", "no"]),
        max_tokens=9,
        stop=["\n\n", "END"],
        timeout_s=5,
        priority=-3,
        lookaheads=pb.Lookaheads(values=[0, 0]),
        resume_token_ids=[7, 8],
        fingerprint="fp_1",
    )
    for call in (client.generate, lambda *args, **named: list(client.stream(*args, **named))):
        call(
            [5, 6],
            max_tokens=9,
            temperature=0,
            top_p=0.9,
            top_k=4,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0,
            frequency_penalty=-1,
            min_tokens=2,
            logit_bias={5: -100, 6: 0.5},
            bad_word_ids=[(1, 2)],
            n=2,
            ignore_eos=True,
            stop_token_ids=(3,),
            bad_words=["bad"],
            logprobs=0,
            prompt_logprobs=2,
            echo=True,
            choice=["yes", "no"],
            seed=0,
            stop=["\n\n", "END"],
            model="demo",
            lookaheads=(0, 0),
            resume_token_ids=(7, 8),
            fingerprint="fp_1",
            timeout_s=5,
            priority=-3,
        )
        assert servicer.request == expected


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("json_schema", {"type": "object"}, '{"type": "object"}'),
        ("json_schema", '{"type": "array"}', '{"type": "array"}'),
        ("json_object", True, True),
        ("regex", "[a-z]+", "[a-z]+"),
        ("grammar", 'start: "a"', 'start: "a"'),
    ],
)
def test_each_form_of_the_output_reaches_the_server(
    client: TriForceClient, servicer: ScriptedGeneration, argument: str, value: object, expected: object
) -> None:
    client.generate("abc", **{argument: value})  # type: ignore[arg-type]
    assert servicer.request.WhichOneof("guide") == argument
    assert getattr(servicer.request, argument) == expected


def test_one_text_is_not_a_list_of_letters(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    client.generate("abc", choice="red", bad_words="foo")
    assert list(servicer.request.choice.values) == ["red"]
    assert list(servicer.request.bad_words) == ["foo"]


def test_every_field_of_the_service_has_its_argument() -> None:
    of_prompt = {"text", "token_ids", "messages", "sampling"}
    of_request = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - of_prompt
    of_sampling = {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    assert CallArguments.__optional_keys__ == of_request | of_sampling
    assert not of_request & of_sampling


def test_an_argument_that_there_is_not_is_refused(client: TriForceClient) -> None:
    for call in (client.generate, client.stream):
        for value in (0.5, None):
            with pytest.raises(TypeError, match="'temprature'"):
                call("abc", temprature=value)  # type: ignore[call-arg]


def test_what_is_left_out_stays_unset(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    """The seed is the exception: the client draws it, so that it can repeat the call."""
    seeds = set()
    for _ in range(4):
        client.generate("abc")
        seeds.add(servicer.request.seed)
        assert servicer.request == pb.GenerateRequest(text="abc", timeout_s=10, seed=servicer.request.seed)
    assert len(seeds) == 4


def test_one_stop_string_is_not_a_list_of_letters(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    client.generate("abc", stop="END")
    assert list(servicer.request.stop) == ["END"]


def test_an_empty_list_of_tokens_is_still_a_prompt(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    client.generate([])
    assert servicer.request.WhichOneof("prompt") == "token_ids"


def test_application_and_metadata_go_along(address: str, servicer: ScriptedGeneration) -> None:
    with TriForceClient(address, application="chat", metadata=[("x-trace", "7")]) as client:
        client.models()
    assert {"application": "chat", "x-trace": "7"}.items() <= servicer.metadata.items()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", InvalidRequestError),
        ("OUT_OF_RANGE", InvalidRequestError),
        ("FAILED_PRECONDITION", FingerprintError),
        ("ABORTED", EngineCrashError),
        ("NOT_FOUND", NotFoundError),
        ("UNAUTHENTICATED", AuthenticationError),
        ("PERMISSION_DENIED", AuthenticationError),
        ("RESOURCE_EXHAUSTED", OverloadedError),
        ("UNAVAILABLE", UnavailableError),
        ("DEADLINE_EXCEEDED", DeadlineExceededError),
        ("CANCELLED", CallCancelledError),
        ("INTERNAL", ServerError),
        ("UNKNOWN", ServerError),
        ("UNIMPLEMENTED", ServerError),
    ],
)
def test_statuses_become_typed_errors(client: TriForceClient, code: str, kind: type[CallError]) -> None:
    for call in (client.generate, lambda prompt: next(client.stream(prompt))):
        with pytest.raises(CallError) as failure:
            call(f"fail:{code}")
        assert type(failure.value) is kind
        assert failure.value.code is grpc.StatusCode[code]
        assert str(failure.value) == f"temperature: -1 must be 0 or more ({code})"
        assert isinstance(failure.value, TriForceError)


def test_a_stream_that_breaks_keeps_what_came_before(client: TriForceClient) -> None:
    stream = client.stream("break")
    assert next(stream).text == "a"
    with pytest.raises(UnavailableError, match="the replica died"):
        next(stream)


def test_nobody_at_the_address_is_unavailable() -> None:
    server, port = serve(ScriptedGeneration())
    server.stop(grace=None).wait()
    with TriForceClient(f"127.0.0.1:{port}", timeout_s=5, retries=0) as client, pytest.raises(UnavailableError):
        client.generate("abc")


def test_a_server_that_comes_back_is_found_again() -> None:
    server, port = serve(ScriptedGeneration())
    with TriForceClient(f"127.0.0.1:{port}", timeout_s=5, retries=0) as client:
        client.models()
        server.stop(grace=None).wait()
        with pytest.raises(UnavailableError):
            client.models()
        server, _ = serve(ScriptedGeneration(), port)
        for _attempt in range(100):
            try:
                client.models()
                break
            except UnavailableError:
                threading.Event().wait(0.05)
        assert client.generate("abc").text == "ab"
    server.stop(grace=None).wait()


def test_the_deadline_of_the_call_ends_it(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    with pytest.raises(DeadlineExceededError):
        client.generate("hang", timeout_s=0.5)
    assert servicer.ended.wait(5)
    stream = client.stream("hang", timeout_s=0.5)
    assert next(stream).text == "a"
    with pytest.raises(DeadlineExceededError):
        next(stream)
    assert servicer.ended.wait(5)


def test_the_client_s_deadline_is_the_default(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    client.generate("abc")
    assert servicer.time_remaining is not None
    assert 5 < servicer.time_remaining < 11
    client.generate("abc", timeout_s=100)
    assert servicer.time_remaining > 50


def test_closing_a_stream_cancels_the_call(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    stream = client.stream("hang")
    assert next(stream).text == "a"
    assert not servicer.ended.is_set()
    stream.close()
    assert servicer.ended.wait(5)
    assert list(stream) == []


def test_leaving_the_with_block_cancels_the_call(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    with client.stream("hang") as stream:
        next(stream)
    assert servicer.ended.wait(5)


def test_dropping_a_stream_cancels_the_call(client: TriForceClient, servicer: ScriptedGeneration) -> None:
    next(client.stream("hang"))
    gc.collect()
    assert servicer.ended.wait(5)


def test_closing_from_another_thread_ends_the_loop(client: TriForceClient) -> None:
    stream = client.stream("hang")
    threading.Timer(0.2, stream.close).start()
    assert [chunk.text for chunk in stream] == ["a"]


def test_closing_the_client_ends_its_streams(address: str, servicer: ScriptedGeneration) -> None:
    client = TriForceClient(address)
    stream = client.stream("hang")
    next(stream)
    client.close()
    with pytest.raises(CallCancelledError):
        next(stream)
    assert servicer.ended.wait(5)


def test_an_answer_may_be_long(client: TriForceClient) -> None:
    assert len(client.generate("long").text) == 5_000_000
