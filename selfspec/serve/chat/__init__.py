"""Write and read a chat as text: by the template of a model, and by the form of its tool calls."""
