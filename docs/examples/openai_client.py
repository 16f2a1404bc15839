"""The official client of OpenAI (`pip install openai`), unchanged."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.completions.create(model="demo", prompt="def fibonacci(n):", max_tokens=64, temperature=0, seed=1)
print(answer.choices[0].text, answer.usage)
