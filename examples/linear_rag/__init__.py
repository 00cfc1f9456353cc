"""Linear RAG: a layer of linear self-attention as a step of gradient descent (In-Context Optimization, section 3)."""
