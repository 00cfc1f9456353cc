"""Linear RAG, where one layer of linear self-attention is one step of gradient descent (paper 003, section 3)."""
