import './palette.css';
import './panel.css';
