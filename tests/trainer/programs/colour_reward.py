"""A reward for naming the colour of an image, which only a model that sees can earn: red is even, blue is odd.

Completions without an image get none.
"""


def right_colour(image, completion_ids, **columns):
    return [shown and share(shown, ids) for shown, ids in zip(image, completion_ids, strict=True)]


def share(image, ids):
    is_red = image.convert("RGB").getpixel((0, 0))[0] > 128
    return sum((token % 2 == 0) == is_red for token in ids) / len(ids)
