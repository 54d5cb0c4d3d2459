/** The order of the queue: headings that sort, and a list of orders where a narrow window has no headings. */

import {button, el, set} from "./dom.js";

/** By `order` of the daemon's list; the first is its default. */
const QUEUE_ORDER = ["", "Queue order"];

export class Sorting {
  /** `choose(order)` shows the queue in another order; "" is the order in which jobs start. */
  constructor(columns, list, choose) {
    this.columns = columns;
    this.list = list;
    this.choose = choose;
    this.order = "";
    this.heads = columns.map((column) => this.makeHead(column));
    list.append(...[QUEUE_ORDER, ...columns.flatMap(optionsOf)].map(([value, text]) => el("option", {value, text})));
    list.addEventListener("change", () => this.choose(list.value));
  }

  makeHead(column) {
    const content = column.sort ? button(column.title, () => this.choose(this.next(column)), "sort") : column.title;
    return el("th", {scope: "col", class: column.kind}, content);
  }

  /** The order after a click: the column's first direction, the opposite one, then the queue's own order. */
  next(column) {
    const turns = directionsOf(column);
    return turns[turns.indexOf(this.order) + 1] ?? "";
  }

  show(order) {
    this.order = order;
    this.list.value = order;
    this.heads.forEach((head, place) => {
      const {sort} = this.columns[place];
      const isSorted = sort && order.replace("-", "") === sort;
      set(head, "aria-sort", isSorted ? (order.startsWith("-") ? "descending" : "ascending") : null);
    });
  }
}

const directionsOf = ({sort, isDown}) => (isDown ? [`-${sort}`, sort] : [sort, `-${sort}`]);

const optionsOf = (column) =>
  (column.sort ? directionsOf(column).map((order) => [order, `${column.title} ${order.startsWith("-") ? "↓" : "↑"}`]) : []);
