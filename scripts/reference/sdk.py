"""The page of the Python SDK, from its signatures, docstrings and comments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator

from scripts.reference.markdown import code, fenced, sentence, table
from triforce_core import client
from triforce_core.client.calls import Client
from triforce_core.client.errors import ERROR_OF_STATUS, CallError
from triforce_core.client.results import Controller


def page() -> str:
    public = [getattr(client, name) for name in client.__all__]
    errors: list[type[CallError]] = [each for each in public if is_subclass(each, CallError)]
    results = [
        client.Completion,
        client.Choice,
        client.Chunk,
        client.Usage,
        client.Stats,
        client.Acceptance,
        Controller,
    ]
    results += [client.TokenLogprobs, client.Model]
    parts = [
        "# SDK\n",
        "For Python programs: the gRPC client `triforce_core.client`, which needs grpcio and protobuf alone.\n",
        "A plain `pip install` of this project installs nothing else. [The guide](../sdk.md) has examples.\n",
        fenced("python", "docs/examples/sdk_client.py"),
        "## Both clients\n",
        f"### `{signature_of(Client.__init__, 'TriForceClient')}`\n",
        f"### `{signature_of(Client.__init__, 'AsyncTriForceClient')}`\n",
        sentence(Client.__doc__) + "\n",
    ]
    for cls in (client.TriForceClient, client.ChunkStream, client.AsyncTriForceClient, client.AsyncChunkStream):
        parts += class_of(cls)
    parts += ["## Arguments of a call\n", sentence(client.CallArguments.__doc__).partition("\n")[0] + "\n"]
    parts.append(table(("argument", "type", "meaning"), fields_of(client.CallArguments)))
    parts.append("## Results\n")
    for each in results:
        doc = "" if (each.__doc__ or "").startswith(f"{each.__name__}(") else sentence(each.__doc__) + "\n"
        parts += [f"### `{each.__name__}`\n", doc, table(("field", "type", "meaning"), fields_of(each))]
    codes: dict[type, list[str]] = {}
    for status, error in ERROR_OF_STATUS.items():
        codes.setdefault(error, []).append(code(status.name))
    rows = [(code(each.__name__), ", ".join(codes.get(each, ())), sentence(each.__doc__)) for each in errors]
    parts += ["## Errors\n", table(("error", "gRPC status", "meaning"), rows)]
    return "\n".join(part for part in parts if part)


def is_subclass(value: object, base: type) -> bool:
    return inspect.isclass(value) and issubclass(value, base)


def class_of(cls: type) -> Iterator[str]:
    """A class with its public methods."""
    yield f"## `{cls.__name__}`\n"
    yield sentence(cls.__doc__) + "\n"
    for name, method in vars(cls).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            yield f"### `{signature_of(method, name)}`\n"
            yield sentence(method.__doc__) + "\n"


def signature_of(method: Callable[..., object], name: str) -> str:
    """The method's signature as its source has it, without `self`."""
    [node] = ast.parse(inspect.cleandoc("\n" + inspect.getsource(method))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert node.returns is not None
    del node.args.args[0]
    returned = "" if method.__name__ == "__init__" else f" -> {ast.unparse(node.returns)}"
    waits = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{waits}{name}({ast.unparse(node.args)}){returned}"


def fields_of(cls: type) -> list[tuple[str, str, str]]:
    """The class's annotated fields, with the comments beside them or on lines of their own above them."""
    lines, _ = inspect.getsourcelines(cls)
    [node] = ast.parse("".join(lines)).body
    assert isinstance(node, ast.ClassDef)
    rows, above = [], ""
    fields = {each.lineno: each for each in node.body if isinstance(each, ast.AnnAssign)}
    for number, line in enumerate(lines, start=1):
        if line.strip().startswith("#"):
            above = f"{above} {line.strip().removeprefix('#').strip()}".strip()
        elif (field := fields.get(number)) is not None:
            beside = line[(field.end_col_offset or 0) :].partition("#")[2].strip()
            rows.append((code(ast.unparse(field.target)), code(ast.unparse(field.annotation)), beside or above))
        else:
            above = ""
    return rows
