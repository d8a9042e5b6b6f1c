// Elements of the page. Names, reasons and outputs of models are an attacker's words: they reach
// the page as text nodes and attribute values alone, and no module of it writes markup.

export const byId = (id) => document.getElementById(id);

// Create an element; `attributes` may hold `text`, and functions by the name of an event (`onclick`).
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Set an element's text, unless it has it: what does not change is neither drawn nor read aloud.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Make a parent's children these elements, moving and removing as few as possible.
export function arrange(parent, children) {
  children.forEach((child, i) => {
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

// Make a select's options these values, keeping the choice where it is still there.
export function options(select, values, labels = values) {
  const before = [...select.options];
  if (before.length === values.length && before.every(({ value, text }, i) => value === values[i] && text === labels[i])) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((value, i) => element("option", { value, text: labels[i] })));
  if (values.includes(chosen)) select.value = chosen;
}
