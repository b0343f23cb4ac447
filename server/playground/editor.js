// The processor's editor: CodeMirror in a shadow root, so that its styles need no exception in the content policy.

import {
  Decoration,
  EditorState,
  EditorView,
  HighlightStyle,
  LanguageSupport,
  StateEffect,
  StateField,
  bracketMatching,
  closeBrackets,
  closeBracketsKeymap,
  defaultKeymap,
  drawSelection,
  highlightActiveLine,
  highlightActiveLineGutter,
  history,
  historyKeymap,
  indentOnInput,
  indentUnit,
  indentWithTab,
  keymap,
  lineNumbers,
  lintGutter,
  pythonLanguage,
  setDiagnostics,
  syntaxHighlighting,
  tags,
} from "./vendor/codemirror.js";

const setErrorLine = StateEffect.define();

/** Decorates the line with the error until the next edit. */
const errorLine = StateField.define({
  create: () => Decoration.none,
  update(lines, transaction) {
    for (const effect of transaction.effects) {
      if (!effect.is(setErrorLine)) continue;
      if (effect.value === null) return Decoration.none;
      return Decoration.set([Decoration.line({ class: "error-line" }).range(effect.value)]);
    }
    return transaction.docChanged ? Decoration.none : lines;
  },
  provide: (field) => EditorView.decorations.from(field),
});

// Colours are the page's CSS variables, which a shadow root inherits.
const theme = EditorView.theme({
  "&": { color: "var(--text)", backgroundColor: "var(--code)", fontSize: "0.8125rem" },
  "&:focus-within": { outline: "2px solid var(--focus)", outlineOffset: "-2px" },
  ".cm-scroller": {
    fontFamily: "var(--mono)",
    fontVariantLigatures: "none",
    lineHeight: "1.6",
    maxHeight: "27rem",
    overflow: "auto",
  },
  ".cm-content": { caretColor: "var(--text)", padding: "0.6rem 0" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-gutters": { backgroundColor: "var(--code)", color: "var(--muted)", border: "none" },
  ".cm-lineNumbers .cm-gutterElement": { padding: "0 0.1rem 0 0.6rem" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--active-line)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": {
    background: "var(--selection)",
  },
  "&.cm-focused .cm-matchingBracket": { backgroundColor: "var(--selection)" },
  ".error-line": { backgroundColor: "var(--danger-soft) !important", boxShadow: "inset 3px 0 var(--danger)" },
  // CodeMirror uses data: images here, which the page's content policy forbids.
  ".cm-lintRange-error": { backgroundImage: "none", textDecoration: "underline wavy var(--danger)" },
  ".cm-gutter-lint": { width: "1rem" },
  ".cm-gutter-lint .cm-gutterElement": { padding: "0" },
  ".cm-lint-marker": { width: "1rem", height: "auto" },
  ".cm-lint-marker-error": { content: "normal", color: "var(--danger)" },
  ".cm-lint-marker-error::before": { content: '"▶"', fontSize: "0.65rem", paddingLeft: "0.15rem" },
  ".cm-tooltip": { backgroundColor: "var(--card)", border: "1px solid var(--line)", borderRadius: "6px" },
  ".cm-diagnostic": { borderLeftColor: "var(--danger)", fontFamily: "var(--sans)", maxWidth: "28rem" },
});

const colours = HighlightStyle.define([
  { tag: tags.keyword, color: "var(--syntax-keyword)" }, // and the tags derived from it
  { tag: [tags.string, tags.special(tags.string)], color: "var(--syntax-string)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--syntax-number)" },
  { tag: [tags.definition(tags.className), tags.className], color: "var(--syntax-class)" },
  { tag: tags.function(tags.variableName), color: "var(--syntax-function)" },
  { tag: tags.function(tags.definition(tags.variableName)), color: "var(--syntax-function)" },
  { tag: tags.comment, color: "var(--muted)", fontStyle: "italic" },
]);

/**
 * @typedef {object} Editor
 * @property {() => string} text
 * @property {(key: string, text: string) => void} open shows a text. Each key has a history of its own, to undo edits
 * @property {(text: string) => void} replace replaces the text; can be undone
 * @property {(line: number, message: string) => void} showError at a line, from 1
 * @property {() => void} clearError
 * @property {(line: number) => void} goTo moves the cursor to a line and looks there
 */

/**
 * @param {HTMLElement} host the element that becomes the editor
 * @param {{label: string, describedBy: string, onChange: () => void, onRun: () => void}} options `describedBy`:
 *   description for screen readers
 * @returns {Editor}
 */
export function createEditor(host, { label, describedBy, onChange, onRun }) {
  const root = host.attachShadow({ mode: "open", delegatesFocus: true });
  const run = () => {
    onRun();
    return true;
  };
  const extensions = [
    lineNumbers(),
    lintGutter(),
    highlightActiveLineGutter(),
    highlightActiveLine(),
    history(),
    drawSelection(),
    indentOnInput(),
    indentUnit.of("    "),
    bracketMatching(),
    closeBrackets(),
    keymap.of([
      { key: "Mod-Enter", run },
      ...closeBracketsKeymap,
      ...defaultKeymap.filter(({ key }) => key !== "Mod-Enter"),
      ...historyKeymap,
      indentWithTab,
    ]),
    new LanguageSupport(pythonLanguage),
    syntaxHighlighting(colours),
    errorLine,
    theme,
    EditorView.contentAttributes.of({
      "aria-label": label,
      "aria-description": describedBy,
      spellcheck: "false",
      tabindex: "0",
    }),
    // `open` replaces the state without a change event, so this listener only gets the user's edits.
    EditorView.updateListener.of(({ docChanged }) => {
      if (docChanged && !isReplacing) onChange();
    }),
  ];
  let isReplacing = false;
  let openKey = "";
  /** @type {Map<string, import("./vendor/codemirror.js").EditorState>} */
  const states = new Map();
  const fresh = (text) => EditorState.create({ doc: text, extensions });
  const view = new EditorView({ state: fresh(""), parent: root, root });
  const lineAt = (line) => view.state.doc.line(Math.min(line, view.state.doc.lines));

  return {
    text: () => view.state.doc.toString(),
    open(key, text) {
      if (key === openKey && text === view.state.doc.toString()) return;
      states.set(openKey, view.state);
      openKey = key;
      const before = states.get(key);
      view.setState(before?.doc.toString() === text ? before : fresh(text));
    },
    replace(text) {
      isReplacing = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
      isReplacing = false;
    },
    showError(line, message) {
      const { from, to, text } = lineAt(line);
      const start = from + text.length - text.trimStart().length;
      view.dispatch(setDiagnostics(view.state, [{ from: start, to: Math.max(to, start), severity: "error", message }]));
      view.dispatch({ effects: [setErrorLine.of(from), EditorView.scrollIntoView(from, { y: "center" })] });
    },
    clearError() {
      view.dispatch(setDiagnostics(view.state, []));
      view.dispatch({ effects: setErrorLine.of(null) });
    },
    goTo(line) {
      const { from } = lineAt(line);
      view.dispatch({ selection: { anchor: from }, effects: EditorView.scrollIntoView(from, { y: "center" }) });
      view.focus();
      host.scrollIntoView({ block: "nearest" });
    },
  };
}
