"""Twenty prompts of 1 to 500 tokens, the same on every machine."""

from __future__ import annotations

from pocketllm.text.tokenizer import Tokenizer

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 129, 200, 257, 384, 500)

_TEXT = """The river rises in the hills above the old town and turns twice before it meets the sea. Fishermen mend their nets along
the quay every morning, and in the market they sell bread, honey, salt and oranges. A short history of the harbour: in 1871 the
first stone pier was built; in 1904 a storm took half of it; by 1912 it stood again, longer than before.

def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)

Question: if a train leaves at 9:40 and the journey takes 2 hours and 35 minutes, when does it arrive? Answer: it arrives at
12:15. Why do leaves change colour in autumn? When days grow shorter a tree stops making chlorophyll, and the yellow and orange
pigments that were there all along can be seen. Water boils at 100 degrees at sea level, and at about 93 degrees two thousand
metres up, because the pressure of the air is lower there. "Have you been here before?" she asked. "Once," he said, "a long time
ago, when the lighthouse still had a keeper." Ingredients: two eggs, a cup of flour, half a cup of milk, a pinch of salt. Mix the
flour and the salt, add the eggs, then the milk, and stir until there are no lumps. Let it rest for half an hour. El perro corre
por la playa; le chien court sur la plage; der Hund läuft am Strand. The committee shall publish its report within thirty days
of the end of each year, and shall send a copy to every member who has asked for one in writing. Photosynthesis turns light,
water and carbon dioxide into sugar and oxygen. SELECT name, COUNT(*) FROM visits WHERE year = 2019 GROUP BY name ORDER BY 2;
"""


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompt k has LENGTHS[k] token ids and begins at a place of its own in the text, so that no two share a prefix."""
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    return [[ids[(37 * index + place) % len(ids)] for place in range(length)] for index, length in enumerate(LENGTHS)]
