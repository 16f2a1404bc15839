.venv/bin/triforce generate --prompt-file scripts/install.py --max-tokens 64 --temperature 0.7
