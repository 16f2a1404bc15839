"""A conversation over the SDK, streamed, then asked on."""

from triforce_core.client import TriForceClient

messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
with TriForceClient("127.0.0.1:9000") as client:
    answer = ""
    for chunk in client.stream_chat(messages, max_tokens=64, temperature=0):
        answer += chunk.text
        print(chunk.text, end="", flush=True)
    print()
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Now one that subtracts."}]
    print(len(client.tokenize(messages)), "tokens")
    print(client.chat(messages, max_tokens=64, temperature=0).text)
