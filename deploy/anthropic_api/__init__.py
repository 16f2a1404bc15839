"""Anthropic's Messages API, as a translation to chats and back."""
