"""Other APIs' words for a chat: Anthropic's messages and Ollama's chat and generate.

    errors            every error on their paths, in their form, whoever raised it
    names             a RequestError about a ChatRequest, told with the fields of the caller's body
    anthropic_checks  what a body of /v1/messages may hold beyond its fields' types
    anthropic_chat    body of /v1/messages -> ChatRequest
    anthropic_events  deltas -> content blocks, whole or as events
    ollama_chat       body of /api/chat or /api/generate -> ChatRequest
    ollama_raw        a text that goes to the model as it is
    ollama_lines      deltas -> lines of JSON
    ollama_models     what there is to run, as Ollama lists it
    ollama_checks     what Ollama's API has and this server has not
    thinking          switching it on and off through the chat template
    tool_ids          ids of calls as Anthropic writes them

What a chat is, and what the engine does with it, is server.chat_service's.
"""
