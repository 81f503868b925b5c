"""OpenAI's Responses on top of a chat request.

items      a request's input, with an id for each item, as JSON
translate  ResponsesRequest and earlier items -> ChatRequest, its errors in our route's words
answer     parts of a chat answer -> output items, events, the response object
"""
