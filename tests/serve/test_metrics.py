"""What the service measures of its answers: probabilities of first hits, those of the calibration, and abstentions."""

import pytest
from support.serving import in_base64, picture, search, served

QUERIES = [{"text": f"{number} {colour} bars"} for number in ("one", "two", "three") for colour in ("red", "blue")]


def values(client):
    lines = (line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


def test_first_hits_stand_beside_what_the_calibration_expects_and_abstentions_are_counted(sources):
    with served(sources) as client:
        said = [answer["hits"][0]["match_probability"] for answer in search(client, *QUERIES, max_results=1)]
        told = values(client)
        search(client, *QUERIES, min_probability=0.01)  # Neither a cut nor a filter, nor another kind of query.
        search(client, *QUERIES, filter={"max_total_variance": 1e9})
        search(client, {"image": in_base64(picture())})
        after, risks = values(client), client.get("/v1/info").json()["galleries"]["images"]["risks"]
        answers = [answer for risk in risks for answer in search(client, *QUERIES, abstain=risk)]
        abstentions = values(client)
    name = 'sfumato_first_hit_probability_{}{{gallery="images",{}target="listed"}}'
    assert told[name.format("count", "")] == after[name.format("count", "")] == len(QUERIES)
    assert told[name.format("sum", "")] == pytest.approx(sum(said), rel=1e-4)
    limit = sorted(said)[2]
    bucket = next(k / 10 for k in range(1, 11) if k / 10 >= limit)
    assert told[name.format("bucket", f'le="{bucket}",')] == sum(p <= bucket for p in said)
    fit = sources.galleries["images"].gallery.scorer.of_hits
    expected = float(fit.probability(fit.scores.nearest, n_gallery=48).mean())
    assert told['sfumato_calibrated_probability{gallery="images"}'] == pytest.approx(expected, rel=1e-5)
    # Calibrated on galleries of 48: there are nine texts.
    assert 'sfumato_calibrated_probability{gallery="texts"}' not in told
    for abstained, word in ((True, "yes"), (False, "no")):
        n = sum(answer["abstained"] is abstained for answer in answers)
        assert abstentions.get(f'sfumato_abstentions_total{{abstained="{word}",gallery="images"}}', 0) == n
    assert len(answers) == len(risks) * len(QUERIES) > 0
