"""Where texts of a view lie over each other, or stand out of what holds them: measured in the page, in CSS pixels."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator

# Of every piece of text a rectangle per line, cut to what its ancestors show of it. A line box is higher than its
# letters: a fifth above and below does not count. A cell's output may scroll sideways to a wide table or plot.
FAULTS = """(root) => {
    const WIDE = 'table, .jp-RenderedPlotly';
    const SKIPPED = 'style, script, title, option';
    const edge = root.getBoundingClientRect();
    const boxes = [], faults = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode, holder = node.parentElement;
        if (!node.textContent.trim() || holder.closest(SKIPPED)) continue;
        if (getComputedStyle(holder).visibility === 'hidden' || !holder.getClientRects().length) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const said = node.textContent.trim().slice(0, 40);
        for (const line of range.getClientRects()) {
            const box = {left: line.left, right: line.right, top: line.top + line.height / 5,
                         bottom: line.bottom - line.height / 5, said, node};
            let scrolled = false;
            for (let up = holder; up && up !== root.parentElement; up = up.parentElement) {
                const style = getComputedStyle(up);
                if (style.overflowX === 'visible' || up instanceof SVGElement) continue;
                const clip = up.getBoundingClientRect();
                scrolled ||= style.overflowX !== 'hidden' && (up !== root || holder.closest(WIDE) !== null);
                const cut = box.right > clip.right + 1 || box.left < clip.left - 1;
                if (cut && style.textOverflow !== 'ellipsis' && !scrolled) faults.push(`cut: ${said}`);
                box.left = Math.max(box.left, clip.left);
                box.right = Math.min(box.right, clip.right);
                box.top = Math.max(box.top, clip.top);
                box.bottom = Math.min(box.bottom, clip.bottom);
            }
            if (box.right - box.left < 1 || box.bottom - box.top < 1) continue;
            if (box.right > edge.right + 1 || box.left < edge.left - 1) faults.push(`out: ${said}`);
            boxes.push(box);
        }
    }
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
        const over = a.node !== b.node && a.left < b.right - 1 && b.left < a.right - 1
            && a.top < b.bottom - 1 && b.top < a.bottom - 1;
        if (over) faults.push(`over: ${a.said} | ${b.said}`);
    }));
    return {faults: [...new Set(faults)], texts: boxes.length};
}"""

CONTRAST = """node => {
    const ground = [...document.querySelectorAll('.jp-Notebook')].at(-1);
    const light = colour => {
        const most = colour.startsWith('color(') ? 1 : 255;
        const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(v => v / most)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const style = getComputedStyle(node);
    const ink = light(node instanceof SVGElement ? style.fill : style.color);
    const back = light(getComputedStyle(ground).backgroundColor);
    return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
}"""
"""How far a text stands out from the ground of the notebook: WCAG's ratio, 1 to 21."""


def faults(view: Locator) -> list[str]:
    """What overlaps, is cut without a sign, or stands out of `view`; AssertionError where it holds no text at all."""
    seen: dict[str, Any] = view.evaluate(FAULTS)
    assert seen["texts"], "no text to measure"
    return list(seen["faults"])
