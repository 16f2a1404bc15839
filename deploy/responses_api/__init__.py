"""OpenAI's Responses API without its store, as a translation to chats and back."""
