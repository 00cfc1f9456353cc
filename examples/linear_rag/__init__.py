"""Linear RAG: a linear self-attention layer as a step of gradient descent (In-Context Optimization, section 3)."""
