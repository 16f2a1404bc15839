"""The page of the gRPC services, from the .proto files and their comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc  # type: ignore[import-untyped]

from scripts.reference.markdown import REPOSITORY, code, sentence, table

# Messages between tiers that operators see, as fields of `GET /status`.
REPORTED = ("TierStatus", "SilentPeer", "LinkCounters", "Audit", "ControllerStatus", "KnownAcceptance")


def page() -> str:
    client, tiers = (described(f"triforce/v1/{name}.proto") for name in ("generation", "tiers"))
    return "\n".join(
        [
            "# gRPC\n",
            "For clients in other languages than Python, and for developers: the client API"
            " (`protos/triforce/v1/generation.proto`) in full, and what the tiers say to one another"
            " (`protos/triforce/v1/tiers.proto`) in outline.\n",
            "A server listens on port 9000 (`server.grpc_port`) without TLS. Python programs use the [SDK](sdk.md).\n",
            "## The client API\n",
            client.intro + "\n",
            *client.services(),
            *(part for message in client.file.message_type for part in client.message(message)),
            *client.enums(),
            "## Between the tiers\n",
            tiers.intro + "\n",
            *tiers.services(),
            "### Their messages\n",
            table(("message", "meaning"), tiers.messages()),
            "## What a tier reports\n",
            "`GET /status` gives most of these fields for each tier, some of them in groups or under other names.\n",
            *(part for each in tiers.file.message_type if each.name in REPORTED for part in tiers.message(each)),
        ]
    )


def described(proto: str) -> Proto:
    """The file's descriptor with its comments, by protoc."""
    protos = REPOSITORY / "protos"
    with tempfile.NamedTemporaryFile(suffix=".bin") as output:
        flags = [f"--proto_path={protos}", "--include_source_info", f"--descriptor_set_out={output.name}"]
        if protoc.main(["protoc", *flags, proto]) != 0:
            raise SystemExit("protoc failed; its message is above")
        [file] = FileDescriptorSet.FromString(Path(output.name).read_bytes()).file
    return Proto(file)


class Proto:
    """One .proto file as Markdown. Comments are found by protobuf's paths: numbers of fields and indices in them."""

    SYNTAX, MESSAGES, ENUMS, SERVICES = 12, 4, 5, 6
    MEMBERS = 2  # of a message, an enum or a service

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self.comments = {tuple(each.path): sentence(each.leading_comments) for each in file.source_code_info.location}

    @property
    def intro(self) -> str:
        return self.comments[(self.SYNTAX,)]

    def services(self) -> Iterator[str]:
        for index, service in enumerate(self.file.service):
            yield f"### Service `{service.name}`\n"
            yield self.comments.get((self.SERVICES, index), "") + "\n"
            rows = [
                (
                    code(f"{rpc.name}({arrow(rpc.client_streaming, rpc.input_type)})"),
                    code(arrow(rpc.server_streaming, rpc.output_type)),
                    self.comments.get((self.SERVICES, index, self.MEMBERS, number), ""),
                )
                for number, rpc in enumerate(service.method)
            ]
            yield table(("call", "returns", "meaning"), rows)

    def message(self, message: DescriptorProto) -> Iterator[str]:
        if not message.field:
            return
        index = [*self.file.message_type].index(message)
        yield f"### `{message.name}`\n"
        yield self.comments.get((self.MESSAGES, index), "") + "\n"
        rows = [
            (
                str(field.number),
                code(field.name),
                code(type_of(message, field)),
                self.comments.get((self.MESSAGES, index, self.MEMBERS, number), ""),
            )
            for number, field in enumerate(message.field)
        ]
        yield table(("number", "field", "type", "meaning"), rows)

    def enums(self) -> Iterator[str]:
        for index, enum in enumerate(self.file.enum_type):
            yield f"### `{enum.name}`\n"
            rows = [
                (str(value.number), code(value.name), self.comments.get((self.ENUMS, index, self.MEMBERS, number), ""))
                for number, value in enumerate(enum.value)
            ]
            yield table(("number", "value", "meaning"), rows)

    def messages(self) -> Iterator[tuple[str, str]]:
        for index, message in enumerate(self.file.message_type):
            if message.field:
                yield code(message.name), self.comments.get((self.MESSAGES, index), "")


def arrow(streaming: bool, kind: str) -> str:
    return ("stream " if streaming else "") + kind.rpartition(".")[2]


def type_of(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """A field's type as a .proto file writes it."""
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = field.type_name.rpartition(".")[2] or scalar
    entry = next((each for each in message.nested_type if each.options.map_entry and each.name == name), None)
    if entry is not None:
        return f"map<{', '.join(type_of(entry, part) for part in entry.field)}>"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    return f"{name}, in oneof {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else name
