// People's verdicts on results: thumbs beside each, a request for some of them, and what they changed.
import { json } from "./service.js";
import { made, nameOf, some } from "./words.js";

const ENOUGH = 100; // verdicts; then none are asked for
const me = () => (localStorage["sfumato-judge"] ??= `web-${Math.random().toString(36).slice(2, 8)}`); // each browser is a judge

// used(sentence): what the verdicts have changed.
export function judging(section, { query, hits }, used) {
  const asked = hits.filter(({ to_judge }) => to_judge);
  const line = made("judging").firstElementChild;
  const [, words, use] = line.children;
  const thumbs = [];
  let [n, given] = [0, new Map()];
  const show = (problem) => {
    const done = asked.filter(({ id }) => given.get(id) != null).length;
    const asking = section.classList.toggle("asking", n < ENOUGH && done < asked.length);
    words.textContent = problem ?? (asking ? `${done} of ${asked.length} judged.` : `${some(n, "verdict")} so far.`);
    use.hidden = !n;
    for (const [node, id, yes] of thumbs) node.ariaPressed = given.get(id) === yes;
  };
  let last = Promise.resolve();
  const then = (act) => (last = last.then(act).catch(({ title, message }) => show(`${title}. ${message}`)));
  const give = ({ id, match_probability: probability, to_judge }, pressed) => then(async () => {
    const yes = given.get(id) === pressed ? null : pressed;
    const judgements = [{ query, id, yes, probability, ...to_judge }];
    ({ n } = await json("v1/judgements", { body: { judge: me(), judgements } }));
    given.set(id, yes);
    show();
  });
  for (const { item, parentNode } of section.querySelectorAll(".pick")) {
    const group = made("thumbs").firstElementChild;
    group.ariaLabel = `${item.to_judge ? "Please judge" : "Judge"} ${nameOf(item)}`;
    [...group.children].forEach((node, i) => {
      thumbs.push([node, item.id, !i]);
      node.onclick = () => give(item, !i);
    });
    parentNode.classList.toggle("asked", item.to_judge);
    parentNode.append(group);
    parentNode.onkeydown = ({ key, ctrlKey, metaKey }) => void (ctrlKey || metaKey || ("yn".includes(key) && give(item, key === "y")));
  }
  use.onclick = () => then(async () => used((await json("v1/judgements", { body: { use: true } })).used.text));
  section.querySelector(".grid").before(line);
  then(async () => {
    const told = await json(`v1/judgements?${new URLSearchParams({ query, judge: me(), figures: false })}`);
    [n, given] = [told.n, new Map(Object.entries(told.given))];
    show();
  });
}
