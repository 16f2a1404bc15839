printf 'def fibonacci(n):\n/quit\n' | .venv/bin/triforce chat --address 127.0.0.1:9000 --max-tokens 64 --seed 1
