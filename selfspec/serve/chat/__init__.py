"""What a chat is as text: the template of a model, and how calls of tools are written and read."""
