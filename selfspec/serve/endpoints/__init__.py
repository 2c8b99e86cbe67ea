"""The interfaces of clients: OpenAI's completions, chats and responses, and Anthropic's messages."""
