"""HTTP below the APIs: connections, middleware, API keys, bodies, SSE, the OpenAPI document."""
