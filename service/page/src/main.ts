// The entry point of the page. If the HTML file contains a document (a report or a trajectory), the page
// shows it, without any request. Otherwise it is the page of a live run, and requests the run's API.

import "../node_modules/uplot/dist/uPlot.min.css";
import "./page.css";
import { ask, hasKey, keepKey, Refused } from "./api";
import { followTheme } from "./charts";
import { fill, h, on } from "./dom";
import type { PageDocument, RunDocument, TrajectoryDocument } from "./documents";
import { LISTS, ListView, showTask } from "./lists";
import { joined, RunView } from "./run";
import { TrajectoryView } from "./trajectory";

const ASK_EVERY_MS = 2000;
const TABS: [string, string][] = [
  ["", "Run"],
  ["rollouts", "Tasks"],
  ["sessions", "Sessions"],
  ["trajectories", "Trajectories"],
];

interface View {
  close(): void;
}

function showDocument(page: HTMLElement, doc: PageDocument): void {
  if (doc.kind === "run") new RunView(page).update(doc);
  else new TrajectoryView(page, doc);
}

/** The page of a live run. The part of the URL after # selects the view. */
class LivePage {
  private readonly nav = h("nav", { "aria-label": "Views" });
  private readonly banner = h("p", { class: "banner", role: "alert", hidden: true });
  private readonly place = h("div", { id: "view" });
  private view: View | null = null;
  private run: RunDocument | null = null;
  private timer = 0;
  private route = "";

  constructor(page: HTMLElement) {
    page.classList.add("live");
    fill(page, this.nav, this.banner, this.place);
    addEventListener("hashchange", () => this.open());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.view instanceof RunView) void this.refresh();
    });
    this.open();
  }

  private open(): void {
    const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
    const id = decodeURIComponent(rest.join("/"));
    this.route = location.hash;
    clearTimeout(this.timer);
    this.view?.close();
    this.view = null;
    this.banner.hidden = true;
    fill(this.place);
    this.drawTabs(name);
    const failed = (error: unknown) => this.failed(error);
    if (name === "rollouts" && id) void showTask(this.place, id, failed);
    else if (name === "trajectories" && id) void this.showTrajectory(id);
    else if (name in LISTS) this.view = new ListView(this.place, LISTS[name], failed);
    else {
      this.view = new RunView(this.place);
      if (this.run) (this.view as RunView).update(this.run);
      void this.refresh();
    }
  }

  private drawTabs(current: string): void {
    const tabs = TABS.map(([name, label]) =>
      h("a", { href: `#/${name}`, "aria-current": name === current ? "page" : null }, label),
    );
    const forget = on(h("button", { type: "button", class: "more" }, "forget the key"), {
      click: () => {
        keepKey(null);
        this.run = null;
        this.open();
      },
    });
    fill(this.nav, h("b", {}, "Rayloom"), ...tabs, hasKey() ? forget : null);
  }

  private async refresh(): Promise<void> {
    const { view, route } = this;
    clearTimeout(this.timer);
    try {
      const steps = this.run?.steps.step ?? [];
      const after = (steps[steps.length - 1] as number | undefined) ?? 0;
      const next = await ask<RunDocument>("run", { after, term: this.run?.term ?? 0 });
      if (this.route !== route || !(view instanceof RunView)) return;
      this.run = joined(this.run, next);
      view.update(this.run);
      this.banner.hidden = true;
    } catch (error) {
      if (this.route !== route) return;
      if (!this.failed(error)) return;
    }
    if (!document.hidden) this.timer = window.setTimeout(() => void this.refresh(), ASK_EVERY_MS);
  }

  private async showTrajectory(id: string): Promise<void> {
    const { route } = this;
    fill(this.place, h("p", { class: "missing" }, "Reading the journal …"));
    try {
      const doc = await ask<TrajectoryDocument>(`rollouts/${encodeURIComponent(id)}/trajectory`);
      if (this.route === route) this.view = new TrajectoryView(this.place, doc);
    } catch (error) {
      if (this.route === route) this.failed(error);
    }
  }

  /** Show the error, or the form for the API key. Return whether the request can succeed later. */
  private failed(error: unknown): boolean {
    if (error instanceof Refused && error.status === 401) {
      this.askForKey();
      return false;
    }
    const text = error instanceof Refused ? error.message : "The run does not answer; the page tries again.";
    fill(this.banner, text);
    this.banner.hidden = false;
    return !(error instanceof Refused) || error.status >= 500;
  }

  private askForKey(): void {
    this.view?.close();
    const input = h("input", { type: "password", name: "key", autocomplete: "off", required: true });
    const wasWrong = hasKey();
    const form = h(
      "form",
      { class: "key card" },
      h("h2", {}, "This run requires an API key"),
      wasWrong ? h("p", { class: "note wrong" }, "This is not the API key of the run.") : null,
      h("label", {}, "API key", input),
      h("button", { type: "submit" }, "Show the run"),
      h("p", { class: "note" }, "The key is kept until you close this tab, and is sent only to this run."),
    );
    on(form, {
      submit: (event) => {
        event.preventDefault();
        keepKey(input.value.trim());
        this.open();
      },
    });
    fill(this.place, form);
    input.focus();
  }
}

const page = document.getElementById("page") as HTMLElement;
const given = JSON.parse(document.getElementById("document")?.textContent ?? "null") as PageDocument | null;
followTheme();
if (given) showDocument(page, given);
else new LivePage(page);
