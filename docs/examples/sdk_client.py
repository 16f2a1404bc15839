"""The gRPC SDK: a stream, then a whole completion that is a JSON object."""

from triforce_core.client import TriForceClient

with TriForceClient("127.0.0.1:9000") as client:
    for chunk in client.stream("def fibonacci(n):", max_tokens=64, temperature=0):
        print(chunk.text, end="", flush=True)
    print()
    print(client.generate("config = ", max_tokens=64, seed=1, json_schema={"type": "object"}).text)
