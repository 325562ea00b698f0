"""Twenty prompts of 1 to 500 tokens, and longer texts of several kinds, the same on every machine."""

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


STORY = """Marta kept the key to the boathouse on a nail behind the kitchen door. Nobody had asked for it in nine years, so when the
letter came she read it twice before she believed it. Her brother was coming home. He would take the evening train, he wrote, and
he hoped that the old boat was still dry. She went down to the shore that afternoon with a lamp and a broom. The lock had rusted,
and she had to turn the key with both hands. Inside it smelled of tar and of apples. The boat lay where their father had left it,
upside down on two beams, and under it a family of mice had made a nest of newspaper. She swept around them. Then she sat on the
step and watched the water until the light went out of it. At six the train whistled on the far side of the valley. She did not
get up at once. She was thinking of the summer in which they had rowed to the island without telling anyone, of the storm that
kept them there, and of what he had promised her when they were both afraid. She wondered whether he remembered it too.
"""

CHAT = """<|im_start|>system
You are a helpful assistant who answers in full sentences.<|im_end|>
<|im_start|>user
What is the difference between weather and climate?<|im_end|>
<|im_start|>assistant
Weather is what happens in the air at one place and time, such as rain this afternoon or a cold night. Climate is the pattern of
weather at a place over many years, so it tells you what to expect, while the weather is what you get.<|im_end|>
<|im_start|>user
Can one hot day prove that the climate is changing?<|im_end|>
<|im_start|>assistant
No, a single hot day can't prove it. To see a change in climate you compare averages over decades: if hot days become more common
year after year, and in many places, then the climate is changing.<|im_end|>
<|im_start|>user
Give me three things that I can measure at home.<|im_end|>
<|im_start|>assistant
1. The temperature, with a thermometer that hangs in the shade.
2. The rain, with a straight glass and a ruler.
3. The direction of the wind, with a ribbon on a stick.<|im_end|>
"""

CODE = """from collections import deque


class Graph:
    def __init__(self):
        self.edges = {}

    def add_edge(self, a, b):
        self.edges.setdefault(a, set()).add(b)
        self.edges.setdefault(b, set()).add(a)

    def shortest_path(self, start, goal):
        # Breadth-first search: the first path that reaches the goal is a shortest one.
        queue = deque([[start]])
        seen = {start}
        while queue:
            path = queue.popleft()
            if path[-1] == goal:
                return path
            for neighbour in self.edges.get(path[-1], ()):
                if neighbour not in seen:
                    seen.add(neighbour)
                    queue.append(path + [neighbour])
        return None


if __name__ == "__main__":
    graph = Graph()
    for a, b in [("A", "B"), ("B", "C"), ("C", "D"), ("A", "E"), ("E", "D")]:
        graph.add_edge(a, b)
    print(graph.shortest_path("A", "D"))
"""

SUMS = """Problem: A shop sells pencils at 3 for 2 euros. How much do 12 pencils cost?
Solution: 12 pencils are 12 / 3 = 4 groups of three. Each group costs 2 euros, so they cost 4 * 2 = 8 euros.

Problem: A tank holds 240 litres. It is filled at 15 litres a minute and leaks 3 litres a minute. How long does it take to fill it?
Solution: Each minute adds 15 - 3 = 12 litres. The tank is full after 240 / 12 = 20 minutes.

Problem: The sum of two numbers is 50 and their difference is 8. What are the numbers?
Solution: Let x be the larger one and y the smaller one. Then x + y = 50 and x - y = 8. Adding both gives 2x = 58, so x = 29 and y = 21.
"""

RECORDS = """{
  "station": "Harbour North",
  "opened": "1998-04-12",
  "platforms": [
    {"number": 1, "length_m": 210, "lines": ["S1", "S3"], "step_free": true},
    {"number": 2, "length_m": 210, "lines": ["S1", "S3"], "step_free": true},
    {"number": 3, "length_m": 140, "lines": ["R7"], "step_free": false}
  ],
  "departures": [
    {"time": "08:05", "line": "S1", "to": "Airport", "platform": 1, "delay_min": 0},
    {"time": "08:12", "line": "R7", "to": "Lakeside", "platform": 3, "delay_min": 4},
    {"time": "08:20", "line": "S3", "to": "University", "platform": 2, "delay_min": 0}
  ]
}
"""

LANGUAGES = """Le matin, ma grand-mère ouvre les volets et met le café sur le feu. Elle dit toujours que le pain est meilleur quand on
le mange avec des amis. Am Abend gehen wir am Fluss spazieren, und mein Bruder erzählt von seiner Arbeit in der Stadt. El domingo
vamos a la montaña con los niños; llevamos agua, fruta y un mapa, porque el camino no es fácil. La biblioteca apre alle nove e chiude
alle sei, ma il sabato resta aperta fino a mezzanotte.
"""

RULES = """Article 4. Lending of tools. A member may borrow up to three tools at a time for a period of fourteen days. The period may be
extended once, provided that no other member has reserved the tool. A tool that is returned late costs the borrower fifty cents for
each day of delay, but never more than half of its price. Whoever breaks a tool shall report it without delay and shall pay for its
repair, unless the damage was caused by ordinary wear. The workshop keeps a list of all tools, of their state, and of their borrowers;
any member may read it during opening hours.
"""

TEXTS = {"story": STORY, "chat": CHAT, "code": CODE, "sums": SUMS, "records": RECORDS, "languages": LANGUAGES, "rules": RULES}
