"""OpenAI's Responses on top of a chat request.

items       the items of a request's input: their schema, and as JSON with ids
translate   ResponsesRequest and earlier items -> ChatRequest, cut to the context by `truncation`
output      parsed chunks of an answer -> output items and their events
answer      the response object and its events
database    responses in SQLite
store       calls the database off the event loop; earlier responses that a request refers to
background  responses without a connection
"""
