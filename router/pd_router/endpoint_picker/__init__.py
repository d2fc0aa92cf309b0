"""The router's choice of nodes for a gateway: an endpoint picker of Gateway API's InferencePool.

`picks`: what is chosen for one request, and what it occupies. `gateway_exchange`: one HTTP request as the messages of
`envoy.service.ext_proc.v3` (`messages`). `grpc_server`: the port that gateways call. Only `picks` and `config` do
without the packages protobuf and grpcio.
"""
