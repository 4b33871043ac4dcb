"""What the callback does to a trainer while it trains. Every change is recorded and undone when training ends.

1. `seeds.py`, `exchange.py`: ranks compare seeds and versions before the first step.
2. `held_models.py`: the models that a trainer holds beside the one that it trains (reference, teacher).
3. `grpo_groups.py`, `balance.py`: which rows of a GRPO batch a micro-batch and a rank get.
4. `grpo_plan.py`: the gradient of TRL's GRPO loss, handed to the head before it runs.
5. `loss_filter.py`: losses that are not finite are filtered on the device.
"""
