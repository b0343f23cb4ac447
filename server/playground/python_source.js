// Parsing of a processor's source, and of error messages about it.

import { pythonLanguage } from "./vendor/codemirror.js";

const BASE = "CustomLogitProcessor";

/**
 * Finds the processor class: the last top-level class that derives from `CustomLogitProcessor`, directly or through
 * another class of the source; else the last class.
 * @param {string} source
 * @returns {string} "" if there is no class
 */
export function processorClass(source) {
  const processors = new Set([BASE]);
  let last = "";
  let lastProcessor = "";
  for (const { name, bases } of classes(source)) {
    last = name;
    if (!bases.some((base) => processors.has(base))) continue;
    processors.add(name);
    lastProcessor = name;
  }
  return lastProcessor || last;
}

function* classes(source) {
  const cursor = pythonLanguage.parser.parse(source).topNode.firstChild;
  for (let node = cursor; node; node = node.nextSibling) {
    const definition = node.name === "DecoratedStatement" ? node.getChild("ClassDefinition") : node;
    if (definition?.name !== "ClassDefinition") continue;
    const text = (part) => source.slice(part.from, part.to);
    const name = definition.getChild("VariableName");
    const bases = [...text(definition.getChild("ArgList") ?? { from: 0, to: 0 }).matchAll(/\w+/g)];
    if (name) yield { name: text(name), bases: bases.map(([base]) => base) };
  }
}

/**
 * Finds the line of the source that an error is about.
 * @param {string} message of a refusal; may contain a traceback
 * @param {string} traceback of a fault
 * @returns {number} line number from 1; 0 if there is none
 */
export function lineOf(message, traceback) {
  // The last frame is the innermost one of the last exception.
  const frames = [...`${message}\n${traceback}`.matchAll(/File "<logitship_processor_\d+>", line (\d+)/g)];
  const found = frames.at(-1) ?? /not valid Python [\d.]+: line (\d+)/.exec(message);
  return found ? Number(found[1]) : 0;
}
