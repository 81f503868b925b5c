"""OpenAI's Responses on top of a chat request.

items       a request's input, with an id for each item, as JSON
translate   ResponsesRequest and earlier items -> ChatRequest, its errors with this route's fields
prepare     a request submitted, with `truncation` cut to the context
output      parts of a chat answer -> output items and their events
answer      the response object and the events of its life
database    responses in SQLite; store calls it off the event loop
stored      what a new response takes from stored ones, and how it is stored
background  responses without a connection
"""
