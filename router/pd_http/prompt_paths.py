"""The paths of requests that only ask about their prompts: no token is generated."""

EMBEDDINGS = "/v1/embeddings"
POOLING = "/pooling"
SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
PROMPT_PATHS = (EMBEDDINGS, POOLING, *SCORE_PATHS, *RERANK_PATHS)
