"""`wavefill chat`: the client, the conversation with its commands, the prompt, the server."""
