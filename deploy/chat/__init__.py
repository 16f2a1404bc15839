"""Chats: rendered to prompts by the model's template, and outputs parsed into reasoning, content and tool calls."""
