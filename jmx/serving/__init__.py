"""A server of whole models: continuous batching over a paged cache, and an HTTP API as OpenAI's.

Nothing imports this package but the command line. From the bottom up: `scheduling` decides what a step computes, and
`engine` computes it; `worker` is the process that an engine runs in, `client` the other side of it; `api` has the
endpoints, and `server` runs all of them.
"""
