"""The linearized RAG predictor, its loss and a gradient step on it (In-Context Optimization, section 3, appendix B).

A task is N examples of a query-side feature x1, a retrieval-derived feature x2 and a target y. Every
function takes any number of leading batch dimensions and any floating-point type.
"""

from torch import Tensor


def predict(w1: Tensor, w2: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
    """Return W1 x1 + W2 x2 (section 3.2).

    Shape: (..., dy, d1), (..., dy, d2), (..., N, d1), (..., N, d2) -> (..., N, dy)
    """
    return x1 @ w1.mT + x2 @ w2.mT


def rag_loss(w1: Tensor, w2: Tensor, x1: Tensor, x2: Tensor, y: Tensor) -> Tensor:
    """Return half the mean squared error over the N examples (eq. 3).

    Shape: as `predict`, and y (..., N, dy) -> (...)
    """
    return (predict(w1, w2, x1, x2) - y).square().sum(-1).mean(-1) / 2


def gradient_step(w1: Tensor, w2: Tensor, x1: Tensor, x2: Tensor, y: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Return what one step of gradient descent adds to W1 and to W2 (eq. 4).

    W2 is updated as an independent matrix, whatever it was made from (W1 W_d, or W_z D M^T).

    Shape: as `rag_loss` -> (..., dy, d1), (..., dy, d2)
    """
    scaled = (predict(w1, w2, x1, x2) - y).mT * (-rate / y.shape[-2])
    return scaled @ x1, scaled @ x2


def projection_weight(w1: Tensor, w_d: Tensor) -> Tensor:
    """Return W2 = W1 W_d of the projection-based interface, whose features are x1 = x_q and x2 = D (section 3.2).

    The prediction is then W1 (x_q + W_d D), so W_d maps document embeddings into the space of queries.

    Args:
        w1: shape (..., dy, d_q).
        w_d: shape (..., d_q, d_D), where d_D is the width of D; k concatenated documents of width d have d_D = k d.
    """
    return w1 @ w_d


def dot_product_weight(w_z: Tensor, documents: Tensor, similarity: Tensor) -> Tensor:
    """Return W2 = W_z (sum_i d_i d_i^T) M^T of the dot-product interface, with features x1 = x2 = x_q (eq. 11-19).

    W2 x_q is then the sum of the documents' W_z d_i, each weighted by its similarity x_q^T M d_i to the query.

    Args:
        w_z: shape (..., dy, d).
        documents: d_1 ... d_k, shape (..., k, d).
        similarity: M = W_e^T W_e of a shared encoder, or W_q^T W_d of two; shape (..., d, d).
    """
    return w_z @ (documents.mT @ documents) @ similarity.mT
