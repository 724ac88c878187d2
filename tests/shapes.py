"""The shapes of real models' parameters."""

from __future__ import annotations

NUM_LAYERS, WIDTH, NUM_TOKENS = 24, 1024, 50_257


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Those of the weights of ResNet-50, of norms and biases too."""
    shapes, width = [(64, 3, 7, 7), (64,), (64,)], 64
    for planes, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            of_block = [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if block == 0:
                of_block.append((4 * planes, width, 1, 1))
            shapes += [each for shape in of_block for each in (shape, shape[:1], shape[:1])]
            width = 4 * planes
    return [*shapes, (1000, width), (1000,)]


def transformer_shapes() -> list[tuple[int, ...]]:
    """A decoder like GPT-2 medium: 355M parameters."""
    shapes = [(NUM_TOKENS, WIDTH), (1024, WIDTH)]
    for _ in range(NUM_LAYERS):
        for outputs, inputs in ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)):
            shapes += [(outputs, inputs), (outputs,)]
        shapes += [(WIDTH,)] * 4
    return [*shapes, (WIDTH,), (WIDTH,)]
