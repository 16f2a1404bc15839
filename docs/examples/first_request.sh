curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
    -d '{"model": "demo", "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0, "seed": 1}'
