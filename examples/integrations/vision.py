"""A small ViT classifies images, with Trainer, as without the plugin; the ds_config names it.

It learns which images are bright. See docs/integrations.md.
"""

import torch
from transformers import AutoModelForImageClassification, HfArgumentParser, Trainer, TrainingArguments, ViTConfig


def make_rows(count: int, seed: int) -> list[dict]:
    """Images of noise, 3 x 16 x 16, dark (0) and bright (1) ones."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    bright = torch.randint(2, (count,), generator=generator).tolist()
    return [{"pixel_values": image + is_bright - 0.5, "labels": is_bright} for image, is_bright in zip(images, bright)]


def share_right(predicted) -> dict[str, float]:
    """Of Trainer's EvalPrediction."""
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def main() -> None:
    (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    # A trained one: AutoModelForImageClassification.from_pretrained("google/vit-base-patch16-224")
    model = AutoModelForImageClassification.from_config(ViTConfig(image_size=16, patch_size=4, num_labels=2, **sizes))
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=make_rows(512, seed=0),
        eval_dataset=make_rows(64, seed=1),
        compute_metrics=share_right,
    )
    trainer.train()
    trainer.save_model()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
