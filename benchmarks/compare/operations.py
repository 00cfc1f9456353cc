"""How many operations a step of training takes, so that a comparison can give all entries as many."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from ctx_compress_rag.training.stages.compression import CompressionRecipe

PETA = 1e15


def operations_per_step(recipe: CompressionRecipe) -> float:
    """Mean floating-point operations of matrix products, forward and backward, over all steps of a recipe.

    Nothing is trained. The cost depends on lengths, ratios and layers, and hardly on the weights, which may be
    untrained: in training all gates' passes run.
    """
    job = recipe.make_job()
    model, size = job.model.train(), recipe.optim.batch_size
    with FlopCounterMode(display=False) as counted, torch.compiler.set_stance("force_eager"):
        for step in range(recipe.optim.steps):
            if job.on_step is not None:
                job.on_step(step)
            numbers = range(step * size, (step + 1) * size)
            batch = job.collate([job.examples[number % len(job.examples)] for number in numbers])
            model(**batch)["loss"].backward()
    return float(counted.get_total_flops()) / recipe.optim.steps
