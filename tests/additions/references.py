def mine(m1, v1, m2, v2):
    return sum(abs(a - b) + abs(math.sqrt(s) - math.sqrt(t)) for a, s, b, t in zip(m1, v1, m2, v2, strict=True))


def mine_total(images, texts, match):
    pairs = [
        y * d + (1 - y) * max(1 - d, 0)
        for ds, ys in zip(table(images, texts, csd), match, strict=True)
        for d, y in zip(ds, ys, strict=True)
    ]
    return sum(pairs) / len(pairs)


LOSS_TOTALS["mine"] = mine_total
