// A report as PNG: overview, some curves, a step's timeline, where the time went; with WIDTH, the whole page so wide.
//
//   npm install --prefix FOLDER puppeteer-core @sparticuz/chromium && cp photograph.mjs FOLDER
//   node FOLDER/photograph.mjs report.html report.png [WIDTH]
//
// Prints what goes wrong on the page: errors, requests to a network, content wider than the window, labels cut off.
import {resolve} from "node:path";
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [, , file, out, width] = process.argv;
const executablePath = process.env.CHROMIUM || await chromium.executablePath();
const browser = await puppeteer.launch({args: [...chromium.args, "--no-sandbox"], executablePath, headless: "shell"});
const page = await browser.newPage();
page.on("pageerror", error => console.log("error:", error.message));
page.on("request", request => { if (/^https?:/.test(request.url())) console.log("network:", request.url()); });
await page.setViewport({width: Number(width || 1240), height: 1000, isMobile: Number(width) < 500});
await page.goto("file://" + resolve(file), {waitUntil: "load"});
const pause = milliseconds => new Promise(done => setTimeout(done, milliseconds));
if (!width) {
  await page.evaluate(() => {
    document.querySelectorAll("main > section").forEach(each => { each.hidden = !["overview", "curves", "timelines", "time"].includes(each.id); });
    [...document.querySelectorAll("#curves .panels > div")].forEach((each, place) => { each.hidden = place >= 6; });
  });
}
for (let top = 0; top < await page.evaluate(() => document.body.scrollHeight); top += 500) {
  await page.evaluate(y => scrollTo(0, y), top);  // charts are drawn when they come near
  await pause(200);
}
await page.evaluate(() => scrollTo(0, 0));
await pause(1000);
const found = await page.evaluate(() => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const cut = [...document.querySelectorAll("svg.main-svg text")].filter(text => {
    const inner = text.getBoundingClientRect(), outer = text.closest(".plot").getBoundingClientRect();
    return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1);
  });
  return [...wide > 0 ? [`${wide} pixels too wide`] : [], ...cut.map(text => `cut off: ${text.textContent}`)];
});
found.forEach(each => console.log(each));
await page.screenshot({path: out, fullPage: true});
await browser.close();
